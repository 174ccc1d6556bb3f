"""The packages here have tests of their own, which run where the package is installed."""

collect_ignore_glob = ["flexkv_driver_*"]
