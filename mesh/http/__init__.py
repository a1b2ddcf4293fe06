"""The HTTP server of the clients' port: connections, requests, answers, routes."""
