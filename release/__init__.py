"""Builds and tries what a release consists of: `make dist` and `make matrix`. Needs Python alone; installs the rest."""
