package cleanup_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/cleanup"
)

// The sizes are for a machine that runs each benchmark once, to see that it works. Figures that are published take
// INBOX_BENCH_ROWS=2000000 and -benchtime=1x.

// benchRows returns how many records a benchmark has to do with.
func benchRows(b *testing.B, rows int) int {
	b.Helper()
	if text := os.Getenv("INBOX_BENCH_ROWS"); text != "" {
		var err error
		if rows, err = strconv.Atoi(text); err != nil {
			b.Fatalf("INBOX_BENCH_ROWS: %v", err)
		}
	}
	return rows
}

const (
	benchWorkers = 8
	benchRound   = 1000 // messages
)

// BenchmarkMessagesBesideCleanup processes messages at full load, in rounds by turns without and with three cleaners that
// delete a backlog, until that is gone.
func BenchmarkMessagesBesideCleanup(b *testing.B) {
	for _, database := range databases() {
		b.Run("database="+database.name, func(b *testing.B) {
			for b.Loop() {
				besideCleanup(b, database, benchRows(b, 5_000))
			}
		})
	}
}

func besideCleanup(b *testing.B, database database, rows int) {
	b.Helper()
	table := newTable(b, database)
	table.db.SetMaxOpenConns(benchWorkers)
	table.db.SetMaxIdleConns(benchWorkers)
	table.fillWith(b, rows, database.randomID)
	table.analyze(b)
	deadlocks := table.deadlocks(b)

	var deleted atomic.Int64
	cleaners := make([]*cleanup.Cleaner, 3)
	for i := range cleaners {
		cleaners[i] = newCleaner(b, cleanup.Config{
			Store: table.storeOn(b, database.open(b, table.file, "")),
			Observer: observerFunc(func(event cleanup.RunEvent) {
				deleted.Add(int64(event.Deleted))
			}),
		})
	}
	var without, with load
	without.warmUp(b, table)
	for deleted.Load() < int64(rows) {
		without.round(b, table)

		ctx, cancel := context.WithCancel(b.Context())
		var running sync.WaitGroup
		for _, cleaner := range cleaners {
			running.Go(func() { _ = cleaner.Run(ctx) })
		}
		with.round(b, table)
		cancel()
		running.Wait()
	}
	b.ReportMetric(without.rate(), "msgs/s-without")
	b.ReportMetric(with.rate(), "msgs/s-with")
	b.ReportMetric(with.rate()/without.rate(), "throughput-ratio")
	b.ReportMetric(without.p99(), "p99-ms-without")
	b.ReportMetric(with.p99(), "p99-ms-with")
	b.ReportMetric(with.p99()/without.p99(), "p99-ratio")
	b.ReportMetric(float64(deleted.Load())/with.elapsed.Seconds(), "deleted/s")
	b.ReportMetric(float64(table.deadlocks(b)-deadlocks), "deadlocks")
}

// load is what a number of rounds measured.
type load struct {
	elapsed   time.Duration
	latencies []time.Duration
}

func (l *load) warmUp(b *testing.B, table *table) {
	b.Helper()
	l.round(b, table)
	*l = load{}
}

func (l *load) round(b *testing.B, table *table) {
	b.Helper()
	deduplicator := newDeduplicator(b, table.store)
	var (
		next    atomic.Int64
		mu      sync.Mutex
		workers sync.WaitGroup
	)
	began := time.Now()
	for range benchWorkers {
		workers.Go(func() {
			var latencies []time.Duration
			for next.Add(1) <= benchRound {
				began := time.Now()
				if err := table.process(b.Context(), deduplicator, fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())); err != nil {
					b.Error(err)
					return
				}
				latencies = append(latencies, time.Since(began))
			}
			mu.Lock()
			defer mu.Unlock()
			l.latencies = append(l.latencies, latencies...)
		})
	}
	workers.Wait()
	l.elapsed += time.Since(began)
}

func (l *load) rate() float64 { return float64(len(l.latencies)) / l.elapsed.Seconds() }

// p99 returns the latency that one message in a hundred exceeds, in milliseconds.
func (l *load) p99() float64 {
	slices.Sort(l.latencies)
	return l.latencies[len(l.latencies)*99/100].Seconds() * 1000
}

// analyze leaves to no chance whether the server has looked at the table.
func (t *table) analyze(b *testing.B) {
	b.Helper()
	switch t.database.name {
	case postgreSQL.name:
		t.exec(b, "VACUUM ANALYZE "+t.name)
	case mariaDB.name:
		t.exec(b, "ANALYZE TABLE "+t.name)
	}
}

// BenchmarkDeleteBacklog deletes a backlog while nothing else happens, by one cleaner and by those of three replicas.
func BenchmarkDeleteBacklog(b *testing.B) {
	for _, database := range databases() {
		for _, cleaners := range []int{1, 3} {
			b.Run(fmt.Sprintf("database=%s/cleaners=%d", database.name, cleaners), func(b *testing.B) {
				rows := benchRows(b, 5_000)
				var elapsed time.Duration
				for b.Loop() {
					elapsed += deleteBacklog(b, database, cleaners, rows)
				}
				b.ReportMetric(float64(rows*b.N)/elapsed.Seconds(), "deleted/s")
			})
		}
	}
}

func deleteBacklog(b *testing.B, database database, cleaners, rows int) time.Duration {
	b.Helper()
	table := newTable(b, database)
	table.fillWith(b, rows, database.randomID)
	table.analyze(b)
	began := time.Now()
	var running sync.WaitGroup
	for range cleaners {
		cleaner := newCleaner(b, cleanup.Config{
			Store: table.storeOn(b, database.open(b, table.file, "")), MaxRows: rows + 1,
		})
		running.Go(func() {
			if err := cleaner.RunOnce(b.Context()); err != nil {
				b.Error(err)
			}
		})
	}
	running.Wait()
	elapsed := time.Since(began)
	if n := table.count(b, table.name); n != 0 {
		b.Fatalf("%d rows left", n)
	}
	return elapsed
}

// BenchmarkSQLiteWriterBesideCleanup measures the longest time that a message took, without and with a cleaner.
func BenchmarkSQLiteWriterBesideCleanup(b *testing.B) {
	for _, cleaned := range []bool{false, true} {
		b.Run("cleanup="+strconv.FormatBool(cleaned), func(b *testing.B) {
			rows := benchRows(b, 5_000)
			var longest time.Duration
			for b.Loop() {
				table := newTable(b, sqlite)
				table.fillWith(b, rows, sqlite.randomID)
				var done atomic.Bool
				var cleaning sync.WaitGroup
				if cleaned {
					cleaner := newCleaner(b, cleanup.Config{Store: table.store, MaxRows: rows + 1})
					cleaning.Go(func() {
						defer done.Store(true)
						if err := cleaner.RunOnce(b.Context()); err != nil {
							b.Error(err)
						}
					})
				}
				deduplicator := newDeduplicator(b, table.store)
				for i := 0; i < benchRound || cleaned && !done.Load(); i++ {
					began := time.Now()
					if err := table.process(b.Context(), deduplicator, fmt.Sprint(i)); err != nil {
						b.Fatal(err)
					}
					longest = max(longest, time.Since(began))
				}
				cleaning.Wait()
			}
			b.ReportMetric(longest.Seconds()*1000, "longest-ms")
		})
	}
}

// BenchmarkInsertByID inserts into a table that is large already, with IDs in random order and in the order of time.
func BenchmarkInsertByID(b *testing.B) {
	for _, database := range databases() {
		for _, ids := range []struct{ name, id string }{{"random", database.randomID}, {"ordered", database.orderedID}} {
			b.Run("database="+database.name+"/ids="+ids.name, func(b *testing.B) {
				const perInsert = 10_000
				rows := benchRows(b, 5_000)
				table := newTable(b, database)
				table.fillWith(b, rows, ids.id)
				table.analyze(b)
				before := table.walBytes(b)
				inserted := 0
				for b.Loop() {
					for range max(rows/10/perInsert, 1) {
						table.fillWith(b, perInsert, ids.id)
						inserted += perInsert
					}
				}
				b.ReportMetric(float64(inserted)/b.Elapsed().Seconds(), "inserted/s")
				if database.name == postgreSQL.name {
					b.ReportMetric(float64(table.walBytes(b)-before)/float64(inserted), "wal-bytes/row")
				}
			})
		}
	}
}

// walBytes returns how much PostgreSQL has written to its log.
func (t *table) walBytes(b *testing.B) (bytes int64) {
	b.Helper()
	if t.database.name == postgreSQL.name {
		err := t.db.QueryRowContext(b.Context(), "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&bytes)
		if err != nil {
			b.Fatal(err)
		}
	}
	return bytes
}

// BenchmarkConstantLoad processes messages for a while with a short retention, and says how large the table was after each
// quarter. INBOX_BENCH_ROWS is how many messages: a few minutes of them, for figures that mean something.
func BenchmarkConstantLoad(b *testing.B) {
	for _, database := range databases() {
		b.Run("database="+database.name, func(b *testing.B) {
			for b.Loop() {
				table := newTable(b, database)
				table.db.SetMaxOpenConns(benchWorkers)
				table.db.SetMaxIdleConns(benchWorkers)
				cleaner := newCleaner(b, cleanup.Config{
					Store: table.storeOn(b, database.open(b, table.file, "")), Retention: 10 * time.Second, Interval: time.Second,
				})
				ctx, cancel := context.WithCancel(b.Context())
				var cleaning sync.WaitGroup
				cleaning.Go(func() { _ = cleaner.Run(ctx) })
				var load load
				rounds := benchRows(b, 5_000) / benchRound
				for quarter := range 4 {
					for range max(rounds/4, 1) {
						load.round(b, table)
					}
					b.ReportMetric(float64(table.count(b, table.name)), fmt.Sprintf("rows-%d/4", quarter+1))
					b.ReportMetric(table.megabytes(b), fmt.Sprintf("MB-%d/4", quarter+1))
				}
				b.ReportMetric(load.elapsed.Seconds(), "s")
				cancel()
				cleaning.Wait()
			}
		})
	}
}

// megabytes returns the size of the table and its indexes.
func (t *table) megabytes(b *testing.B) float64 {
	b.Helper()
	query := map[string]string{
		postgreSQL.name: "SELECT pg_total_relation_size('{table}')",
		mariaDB.name: "SELECT file_size FROM information_schema.innodb_sys_tablespaces " +
			"WHERE name = CONCAT(DATABASE(), '/{table}')",
		sqlite.name: "SELECT sum(pgsize) FROM dbstat WHERE name IN (SELECT name FROM sqlite_schema WHERE tbl_name = '{table}')",
	}[t.database.name]
	var bytes sql.NullFloat64
	if err := t.db.QueryRowContext(b.Context(), strings.ReplaceAll(query, "{table}", t.name)).Scan(&bytes); err != nil {
		b.Fatal(err)
	}
	return bytes.Float64 / 1e6
}
