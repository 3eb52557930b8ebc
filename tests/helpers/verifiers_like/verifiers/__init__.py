"""Stand-in for the package verifiers: the parts of its interface that workers use, with one environment, `echo`."""
