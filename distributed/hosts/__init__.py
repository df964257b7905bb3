"""What happens on a host over SSH: the agent, files, the Python environment, addresses."""
