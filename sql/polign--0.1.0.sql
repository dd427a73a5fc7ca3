-- polign 0.1.0. Everything that a user calls lives in schema polign; the operator classes live beside
-- pgvector's own, so that `USING polign_ivf (embedding vector_cosine_ops)` resolves without a schema.

\echo Use "CREATE EXTENSION polign CASCADE" to load this file. \quit

CREATE SCHEMA polign;
GRANT USAGE ON SCHEMA polign TO PUBLIC;

CREATE FUNCTION polign.version() RETURNS text
    AS 'MODULE_PATHNAME', 'version_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
COMMENT ON FUNCTION polign.version() IS 'version of the loaded polign library';

-- Access method

CREATE FUNCTION polign.polign_ivf_handler(internal) RETURNS index_am_handler
    AS 'MODULE_PATHNAME', 'polign_ivf_handler'
    LANGUAGE C;
REVOKE ALL ON FUNCTION polign.polign_ivf_handler(internal) FROM PUBLIC;

CREATE ACCESS METHOD polign_ivf TYPE INDEX HANDLER polign.polign_ivf_handler;
COMMENT ON ACCESS METHOD polign_ivf IS 'nearest neighbour index over cells of quantized vectors in an object store';

-- Each operator class names its metric and element type through support function 1.

CREATE FUNCTION polign.opclass_vector_l2() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_vector_l2_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION polign.opclass_vector_ip() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_vector_ip_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION polign.opclass_vector_cosine() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_vector_cosine_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION polign.opclass_halfvec_l2() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_halfvec_l2_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION polign.opclass_halfvec_ip() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_halfvec_ip_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;
CREATE FUNCTION polign.opclass_halfvec_cosine() RETURNS integer
    AS 'MODULE_PATHNAME', 'opclass_halfvec_cosine_wrapper'
    LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

CREATE OPERATOR CLASS @extschema:vector@.vector_l2_ops
    DEFAULT FOR TYPE @extschema:vector@.vector USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<-> (@extschema:vector@.vector, @extschema:vector@.vector)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_vector_l2();

CREATE OPERATOR CLASS @extschema:vector@.vector_ip_ops
    FOR TYPE @extschema:vector@.vector USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<#> (@extschema:vector@.vector, @extschema:vector@.vector)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_vector_ip();

CREATE OPERATOR CLASS @extschema:vector@.vector_cosine_ops
    FOR TYPE @extschema:vector@.vector USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<=> (@extschema:vector@.vector, @extschema:vector@.vector)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_vector_cosine();

CREATE OPERATOR CLASS @extschema:vector@.halfvec_l2_ops
    FOR TYPE @extschema:vector@.halfvec USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<-> (@extschema:vector@.halfvec, @extschema:vector@.halfvec)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_halfvec_l2();

CREATE OPERATOR CLASS @extschema:vector@.halfvec_ip_ops
    FOR TYPE @extschema:vector@.halfvec USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<#> (@extschema:vector@.halfvec, @extschema:vector@.halfvec)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_halfvec_ip();

CREATE OPERATOR CLASS @extschema:vector@.halfvec_cosine_ops
    FOR TYPE @extschema:vector@.halfvec USING polign_ivf AS
    OPERATOR 1 @extschema:vector@.<=> (@extschema:vector@.halfvec, @extschema:vector@.halfvec)
        FOR ORDER BY pg_catalog.float_ops,
    FUNCTION 1 polign.opclass_halfvec_cosine();

-- Functions and views. Those that take an index check that the caller may read its table.

CREATE FUNCTION polign.index_info(index regclass,
    OUT rows bigint, OUT delta_rows bigint, OUT tombstones bigint, OUT dead_share double precision,
    OUT lists integer, OUT cell_rows_min bigint, OUT cell_rows_avg double precision, OUT cell_rows_max bigint,
    OUT cell_skew double precision, OUT drift double precision,
    OUT store_bytes bigint, OUT objects integer, OUT delta_segments integer, OUT dimensions integer,
    OUT metric text, OUT target_recall double precision, OUT format integer, OUT epoch bigint,
    OUT index_id text, OUT store text, OUT recommendation text)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'index_info_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 1;
COMMENT ON FUNCTION polign.index_info(regclass) IS 'what an index holds and where';

CREATE FUNCTION polign.prewarm(index regclass) RETURNS bigint
    AS 'MODULE_PATHNAME', 'prewarm_wrapper'
    LANGUAGE C STRICT VOLATILE;
REVOKE ALL ON FUNCTION polign.prewarm(regclass) FROM PUBLIC;
COMMENT ON FUNCTION polign.prewarm(regclass) IS 'brings an index into the segment cache; returns its bytes';

CREATE FUNCTION polign.flush(index regclass) RETURNS bigint
    AS 'MODULE_PATHNAME', 'flush_index_wrapper'
    LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION polign.flush(regclass) IS 'moves inserted rows of an index to its store now; returns how many';

CREATE FUNCTION polign.compact(index regclass) RETURNS bigint
    AS 'MODULE_PATHNAME', 'compact_index_wrapper'
    LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION polign.compact(regclass) IS 'moves inserted rows of an index to its store, merges its segments and drops dead rows; returns how many rows were written';

CREATE FUNCTION polign.calibrate(index regclass) RETURNS bigint
    AS 'MODULE_PATHNAME', 'calibrate_to_rows_wrapper'
    LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION polign.calibrate(regclass) IS 'fits the recall curves of an index to its rows, as a build does; returns how many served as queries';

CREATE FUNCTION polign.calibrate(index regclass, query text) RETURNS bigint
    AS 'MODULE_PATHNAME', 'calibrate_to_queries_wrapper'
    LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION polign.calibrate(regclass, text) IS 'fits the recall curves of an index to the vectors that a query returns; returns how many were used';

CREATE FUNCTION polign.recall_curve(index regclass,
    OUT k integer, OUT nprobe integer, OUT cells integer, OUT recall double precision,
    OUT target_recall double precision, OUT samples integer, OUT fitted_to text)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'recall_curve_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 100;
COMMENT ON FUNCTION polign.recall_curve(regclass) IS 'the recall that an index is calibrated for: what a number of cells finds of the nearest k rows';

CREATE FUNCTION polign.recall(index regclass, queries integer DEFAULT 200, k integer DEFAULT 10,
    OUT queries integer, OUT k integer, OUT recall double precision, OUT low double precision,
    OUT high double precision, OUT target_recall double precision, OUT cells_probed double precision)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'recall_of_rows_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 1;
COMMENT ON FUNCTION polign.recall(regclass, integer, integer) IS 'the recall of searches at the settings of the session, measured with rows as queries against exact search';

CREATE FUNCTION polign.recall(index regclass, query text, k integer DEFAULT 10,
    OUT queries integer, OUT k integer, OUT recall double precision, OUT low double precision,
    OUT high double precision, OUT target_recall double precision, OUT cells_probed double precision)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'recall_of_statement_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 1;
COMMENT ON FUNCTION polign.recall(regclass, text, integer) IS 'the same, with the vectors that a query returns';

CREATE FUNCTION polign.verify(index regclass, deep boolean DEFAULT false,
    OUT subject text, OUT place text, OUT problem text)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'verify_index_wrapper'
    LANGUAGE C STRICT VOLATILE;
COMMENT ON FUNCTION polign.verify(regclass, boolean) IS 'a row for each problem of an index: pages, objects, rows of the table; deep reads all of its objects';

CREATE FUNCTION polign.gc(older_than interval DEFAULT '7 days', dry_run boolean DEFAULT true,
    store text DEFAULT NULL,
    OUT object text, OUT bytes bigint, OUT reason text, OUT index text, OUT deleted boolean,
    OUT kept text)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'gc_wrapper'
    LANGUAGE C VOLATILE
    SET search_path = pg_catalog, pg_temp;
REVOKE ALL ON FUNCTION polign.gc(interval, boolean, text) FROM PUBLIC;
COMMENT ON FUNCTION polign.gc(interval, boolean, text) IS 'a row for each object in the store that nothing refers to, and why it is kept; deletes those that are not kept if dry_run is false';

CREATE FUNCTION polign.adopt(index regclass) RETURNS bigint
    AS 'MODULE_PATHNAME', 'adopt_index_wrapper'
    LANGUAGE C STRICT VOLATILE;
REVOKE ALL ON FUNCTION polign.adopt(regclass) FROM PUBLIC;
COMMENT ON FUNCTION polign.adopt(regclass) IS 'says that no other copy of an index lives, so that gc may delete what it inherited; returns the number of writers';

CREATE FUNCTION polign.adopt_dropped(former_system bigint DEFAULT NULL, store text DEFAULT NULL) RETURNS bigint
    AS 'MODULE_PATHNAME', 'adopt_dropped_wrapper'
    LANGUAGE C VOLATILE;
REVOKE ALL ON FUNCTION polign.adopt_dropped(bigint, text) FROM PUBLIC;
COMMENT ON FUNCTION polign.adopt_dropped(bigint, text) IS 'says the same of indexes of this database that are not there any more: those of earlier timelines or of a former server, and those whose copies are gone';

CREATE FUNCTION polign.cache_clear() RETURNS void
    AS 'MODULE_PATHNAME', 'cache_clear_wrapper'
    LANGUAGE C STRICT VOLATILE;
REVOKE ALL ON FUNCTION polign.cache_clear() FROM PUBLIC;
COMMENT ON FUNCTION polign.cache_clear() IS 'empties the segment cache of the cluster';

CREATE FUNCTION polign.stat_cache(
    OUT hits bigint, OUT hit_bytes bigint, OUT misses bigint, OUT lost bigint, OUT faults bigint,
    OUT gets bigint, OUT get_bytes bigint, OUT fetch_ms double precision, OUT retries bigint,
    OUT errors bigint, OUT puts bigint, OUT put_bytes bigint, OUT evictions bigint,
    OUT evicted_bytes bigint, OUT parts bigint, OUT bytes bigint, OUT max_bytes bigint)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'stat_cache_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 1;
REVOKE ALL ON FUNCTION polign.stat_cache() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION polign.stat_cache() TO pg_monitor;
COMMENT ON FUNCTION polign.stat_cache() IS 'what the segment cache of the cluster did since it was made';

CREATE VIEW polign.stat_cache AS SELECT * FROM polign.stat_cache();
GRANT SELECT ON polign.stat_cache TO pg_monitor;
COMMENT ON VIEW polign.stat_cache IS 'what the segment cache of the cluster did since it was made';

CREATE FUNCTION polign.last_scan(
    OUT cells bigint, OUT cells_probed bigint, OUT codes_scanned bigint, OUT rows_reranked bigint,
    OUT heap_rows bigint, OUT parts_missing bigint, OUT waves bigint, OUT gets bigint,
    OUT get_bytes bigint, OUT plan_ms double precision, OUT scan_ms double precision,
    OUT rerank_ms double precision, OUT wait_ms double precision, OUT total_ms double precision)
    RETURNS SETOF record
    AS 'MODULE_PATHNAME', 'last_scan_wrapper'
    LANGUAGE C STRICT VOLATILE ROWS 1;
COMMENT ON FUNCTION polign.last_scan() IS 'what the last scan of a polign_ivf index in this session did; wait_ms is the part of scan_ms and rerank_ms spent waiting for the store, total_ms has the executor''s work too';
