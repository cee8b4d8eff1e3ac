"""All that is not Dagster. From the ground up: workload, graph, algorithms, … conductor, simulation."""
