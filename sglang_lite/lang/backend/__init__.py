"""What programs run on."""
