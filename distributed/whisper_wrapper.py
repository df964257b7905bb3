"""The old name of distributed.worker.whisper_wrapper."""

from distributed.worker.whisper_wrapper import WhisperModelWrapper

__all__ = ["WhisperModelWrapper"]
