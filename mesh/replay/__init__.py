"""Trace replay: play recorded traffic against OpenAI endpoints and say what came of it.

Data flows one way: `trace` (what was recorded) → `schedule` (when and where each request
leaves) → `text` (what it says) → `run` and `client` (the only modules with a clock and a
socket) → `stream` and `tally` (what came back) → `report`.
"""
