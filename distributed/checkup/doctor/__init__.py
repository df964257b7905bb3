"""`multimac doctor`: what this machine is fit for."""
