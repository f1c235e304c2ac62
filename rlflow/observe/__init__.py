"""What a run tells about itself: trackers, the live table, records."""
