"""What `mesh batch` does over HTTP: upload, follow and fetch batch jobs, at any OpenAI endpoint."""
