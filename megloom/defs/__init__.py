"""Empty on purpose: `dg` looks for this package; the definitions are in `megloom.pipelines`."""
