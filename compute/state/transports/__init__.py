"""Ways between nodes: a shared folder, HTTP, Mooncake."""
