"""What a person sees and types; sent to no host."""
