"""The launcher and a worker talk: a control channel of numbered lines that outlives its connection."""
