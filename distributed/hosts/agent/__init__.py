"""Runs on a host, in whatever Python it has: sent there as text, so it needs Python 3.9 or later and no package.

`agent_call` sends these modules, and the few others that they import, in the order of its SENT; nothing is imported
from the host's own copy of the project.
"""
