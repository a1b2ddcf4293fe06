"""Three regions on one machine: wide-area delay, and one supervisor over every process."""
