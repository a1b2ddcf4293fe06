"""Files and batch jobs: their store in JetStream, and the runner that does them."""
