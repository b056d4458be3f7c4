"""Messages between nodes: a header and a payload that is never copied in between."""
