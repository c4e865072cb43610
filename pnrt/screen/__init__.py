"""What the commands show: data in, rich renderables or JSON values out. Nothing here prints."""
