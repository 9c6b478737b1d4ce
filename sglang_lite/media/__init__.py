"""Pictures, videos and sounds before an engine has them: fetched from the web, and decoded from files."""
