-- Wake-ups and events through Redis (docs/redis.md).

-- Tells the session that runs this transaction which lanes got claimable tasks: after the commit its process pushes them to Redis. For
-- sessions with lineshaft.wakeups = 'redis', in place of a notification. The level INFO reaches the client whatever client_min_messages says.
CREATE FUNCTION lineshaft.report_lanes_1(p_lanes integer[]) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RAISE INFO USING MESSAGE = 'lineshaft lanes ' || (
        SELECT string_agg(lane_id || ':' || n, ',')
        FROM (SELECT lane_id, count(*) AS n FROM unnest(p_lanes) AS lane_id GROUP BY lane_id) AS counted
    );
END $$;

-- How far the events are published to a stream of Redis. Its row's lock makes one server the publisher.
CREATE TABLE lineshaft.stream (
    name text PRIMARY KEY,
    -- The place in the feed behind the last event that was published, and that event's number.
    cursor text NOT NULL,
    seq bigint NOT NULL DEFAULT 0,
    published_at timestamptz
);
COMMENT ON TABLE lineshaft.stream IS 'How far the events are published to streams of Redis.';
COMMENT ON COLUMN lineshaft.stream.name IS 'The key of the stream.';
COMMENT ON COLUMN lineshaft.stream.cursor IS 'The place in the feed behind the last published event.';
COMMENT ON COLUMN lineshaft.stream.seq IS 'The number of the last published event: 1 for the first.';
COMMENT ON COLUMN lineshaft.stream.published_at IS 'When it was published.';
