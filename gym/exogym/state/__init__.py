"""A rank's state: in memory, on disk, and how ranks that meet come to one."""
