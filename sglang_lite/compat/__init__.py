"""Names of other packages, on top of all that is here. Nothing but files at those packages' module paths imports it."""
