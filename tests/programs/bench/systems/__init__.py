"""What is measured, one file each: how it is started, and with which settings."""
