"""Where the clusters of others meet this system: a package for each platform, none of them imported by the rest."""
