"""Trace replay: play recorded traffic against OpenAI endpoints and say what came of it.

Data flows one way: `formats` (what was recorded) → `trace` (what all formats have) → `sessions`
and `schedule` (when and where each request leaves) → `text` (what it says) → `run` and `client`
(the only modules with a clock and a socket) → `stream` and `tally` (what came back) → `report`.
"""
