-- Requires: prefix, events; emit. Writes an instance's state and, where it is its model's current instance, the
-- model's state and wire status too; emits `status`. `more` is a table of further event fields, or nil.
local function set_state(instance, state, status, more)
  local record = prefix .. 'instance:' .. instance
  redis.call('HSET', record, 'state', state)
  redis.call('HINCRBY', record, 'state_revision', 1)
  local model = redis.call('HGET', record, 'model')
  local model_record = prefix .. 'model:' .. model
  if redis.call('HGET', model_record, 'instance') == instance then
    redis.call('HSET', model_record, 'state', state, 'status', status)
  end
  emit('status', more, 'model', model, 'instance', instance, 'state', state, 'status', status)
end
