"""One file per table of the metrics reference; turns values into metric families."""
