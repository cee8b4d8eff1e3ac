"""Journal, sealed steps and lineage of the execution graph."""
