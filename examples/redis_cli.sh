id=shell-$$-$(date +%s)
redis-cli -u redis://localhost:6379 XADD embedstream.requests '*' data '{
  "id": "'"$id"'",
  "query": "what is a deadlock?",
  "documents": ["A dead key changes the next letter.", "Two processes wait for each other: a deadlock."]
}'
redis-cli -u redis://localhost:6379 BLPOP "embedstream.reply.$id" 10   # seconds
