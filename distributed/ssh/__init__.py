"""The only room that imports paramiko: connections, host keys, SSH settings."""
