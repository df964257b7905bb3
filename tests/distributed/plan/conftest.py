"""Fixtures that several of these tests share."""

from small_run import folder, job, prepared, run_dir

__all__ = ["folder", "job", "prepared", "run_dir"]
