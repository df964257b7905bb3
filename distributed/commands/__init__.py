"""What the commands do: one module a subject, one function a command, each returning an exit status."""
