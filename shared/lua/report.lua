-- Notes how an instance answers inference. One that never does right is told to the supervisor once, whichever
-- gateways its errors went through; after a first right answer errors are the business of their requests.
--
-- KEYS: instance_key commands
-- ARGV: prefix instance right broken_after
--   right: 1 for an answer that was right, 0 for an error of the engine; broken_after: so many errors in a row
-- Returns: errors so far, 0 once an answer was right
-- Emits: nothing; commands: broken
-- @include ask
if redis.call('EXISTS', instance_key) == 0 or redis.call('HGET', instance_key, 'proven') == '1' then
  return 0
end
if right == '1' then
  redis.call('HSET', instance_key, 'proven', 1)
  redis.call('HDEL', instance_key, 'errors')
  return 0
end
local errors = redis.call('HINCRBY', instance_key, 'errors', 1)
if errors == tonumber(broken_after) then
  ask('verb', 'broken', 'instance', instance, 'errors', errors)
end
return errors
