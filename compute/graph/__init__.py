"""The Multi-Agent Execution Graph as pure data: records, states, the graph in memory and its views."""
