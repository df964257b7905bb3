"""Fixtures that several of these tests share."""

from small_run import folder, job, run_dir

__all__ = ["folder", "job", "run_dir"]
