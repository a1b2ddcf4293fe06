"""Clients that nobody here wrote, pointed at a running mesh unmodified; `make test-clients`."""
