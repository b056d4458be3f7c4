"""Who is in the job, and what happens when that changes. Pure: values in, values out."""
