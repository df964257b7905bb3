"""From a profile and a hosts file to what each rank gets."""
