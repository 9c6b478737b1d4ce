"""Parts of a layer, for each format of their weights and each device."""
