"""The real conductor in virtual time: modelled engines, trainers, workloads and faults; no waiting."""
