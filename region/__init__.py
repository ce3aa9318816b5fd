"""The activation region: the contract between the two ends of a link. region.h and doorbell.h are its definition."""
