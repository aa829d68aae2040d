"""Forward passes: what goes in, what is measured of them, and how one is run again in part."""
