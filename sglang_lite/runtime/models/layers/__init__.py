"""Building blocks of a decoder layer, for each weight format and device."""
