"""An open-loop load on any OpenAI-compatible server: workload, client, report, plot."""
