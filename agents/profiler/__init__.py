"""`mesh-agent profile`: how long iterations take, and which budget keeps online objectives.

`stream` is one request as it is answered, `engine` sends them; `measurement` loads the engine in
steps and fits the latency predictor; `load` says what online and offline requests there are;
`trial` plays them through the agent's own admission; `run` does one after the other and looks for
the budget; `report` and `picture` show what was seen; `command` is the command.
"""
