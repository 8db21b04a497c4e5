-- Requires: leader, token. A paused leader that wakes up finds another token, or none, and can change nothing.
if redis.call('GET', leader) ~= token then
  return { STALE_LEADER }
end
