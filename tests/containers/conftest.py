"""Settings of testcontainers for every test here."""

from testcontainers.core.config import testcontainers_config

# The reaper is an image that would have to be pulled; the tests here remove what they make.
testcontainers_config.ryuk_disabled = True
