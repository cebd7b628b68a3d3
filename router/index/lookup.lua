-- Longest leading run of resident blocks at each location, in one round trip.
-- KEYS: one sorted set a location (member: 8-byte hash, score: when it was last recorded, Unix seconds).
-- ARGV[1]: all hashes, 8 bytes each, leading block first. ARGV[2]: scores below this do not count.
-- Returns, for each key, the length of the run and the score of its deepest block as text.
local packed, since = ARGV[1], tonumber(ARGV[2])
local count = #packed / 8
local step = 64
local answer = {}
for k = 1, #KEYS do
  local run, seen = 0, 0
  local ended = redis.call('EXISTS', KEYS[k]) == 0
  while not ended and run < count do
    local members = {}
    for i = run, math.min(run + step, count) - 1 do
      members[#members + 1] = string.sub(packed, i * 8 + 1, i * 8 + 8)
    end
    local scores = redis.call('ZMSCORE', KEYS[k], unpack(members))
    for i = 1, #scores do
      local score = tonumber(scores[i] or nil)
      if score == nil or score < since then
        ended = true
        break
      end
      run = run + 1
      seen = scores[i]
    end
  end
  answer[#answer + 1] = run
  answer[#answer + 1] = tostring(seen)
end
return answer
