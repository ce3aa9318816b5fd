"""The engine as the API sees it, in the API's process or in another one.

client      EngineClient: what the API asks of an engine
local       LocalEngine: an engine in this process
remote      RemoteEngine: an engine at the other end of a socket
host        EngineHost: serves an EngineClient to the RemoteEngine at the other end of a socket
messages    the messages between the two
metrics     Metrics: what /metrics says
"""
