package testserver_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// abandon makes this executable start the server that it names, tell where it is, and wait for its death.
const abandon = "INBOX_TEST_ABANDON"

var servers = map[string]func() (*testserver.Server, error){
	"postgres": func() (*testserver.Server, error) { return testserver.PostgreSQL() },
	"mariadb":  func() (*testserver.Server, error) { return testserver.MariaDB() },
	"rabbitmq": testserver.RabbitMQ,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(abandon); name != "" {
		server, err := servers[name]()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(server.LogPath())
		select {}
	}
	os.Exit(m.Run())
}

func TestServersComeBackAfterKillsAndStops(t *testing.T) {
	t.Parallel()
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := started(t, name)(start())
			for _, end := range []func(){server.Kill, server.Stop} {
				wantAnswer(t, server, true)
				end()
				wantAnswer(t, server, false)
				if err := server.Start(); err != nil {
					t.Fatal(err)
				}
			}
			wantAnswer(t, server, true)
			server.Remove()
			wantAnswer(t, server, false)
			if _, err := os.Stat(filepath.Dir(server.LogPath())); !os.IsNotExist(err) {
				t.Errorf("its folder is still there: %v", err)
			}
		})
	}
}

func TestServersEndWithTheProcessThatStartedThem(t *testing.T) {
	t.Parallel()
	for name, start := range servers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			started(t, name)(start()).Remove() // or this test is skipped
			parent := exec.CommandContext(t.Context(), os.Args[0])
			parent.Env = append(os.Environ(), abandon+"="+name)
			parent.Stderr = os.Stderr
			output, err := parent.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := parent.Start(); err != nil {
				t.Fatal(err)
			}
			path := bufio.NewScanner(output)
			if !path.Scan() {
				t.Fatal("the server did not start")
			}
			if err := parent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = parent.Wait()
			waitFor(t, "the server's folder to go", func() bool { // when its last process ended
				_, err := os.Stat(filepath.Dir(path.Text()))
				return os.IsNotExist(err)
			})
		})
	}
}

func TestCommittedRowsSurviveKills(t *testing.T) {
	t.Parallel()
	for name, driver := range map[string]string{"postgres": "pgx", "mariadb": "mysql"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := started(t, name)(servers[name]())
			db := open(t, driver, server.DSN)
			execute(t, db, "CREATE TABLE numbers (n INT PRIMARY KEY)")
			for n := range 5 {
				execute(t, db, "INSERT INTO numbers VALUES ("+strconv.Itoa(n)+")")
				server.Kill()
				if err := server.Start(); err != nil {
					t.Fatal(err)
				}
				waitFor(t, "a connection", func() bool { return db.PingContext(t.Context()) == nil })
				wantCount(t, db, n+1)
			}
		})
	}
}

func TestPgBouncer(t *testing.T) {
	t.Parallel()
	postgres := started(t, "postgres")(testserver.PostgreSQL())
	bouncer := started(t, "pgbouncer")(testserver.PgBouncer(postgres, 2))
	db := open(t, "pgx", bouncer.DSN+"&default_query_exec_mode=simple_protocol")
	execute(t, db, "CREATE TABLE numbers (n INT PRIMARY KEY)")
	for n := range 10 { // over more connections than it has
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if _, err := conn.ExecContext(t.Context(), "INSERT INTO numbers VALUES ("+strconv.Itoa(n)+")"); err != nil {
			t.Fatal(err)
		}
	}
	wantCount(t, db, 10)
}

func TestStandbyTakesOver(t *testing.T) {
	t.Parallel()
	primary := started(t, "postgres")(testserver.PostgreSQL())
	standby := started(t, "postgres")(testserver.SynchronousStandby(primary))
	db := open(t, "pgx", testserver.FailoverDSN(primary, standby))
	execute(t, db, "CREATE TABLE numbers (n INT PRIMARY KEY)")
	for n := range 100 {
		execute(t, db, "INSERT INTO numbers VALUES ("+strconv.Itoa(n)+")")
	}
	primary.Kill()
	if err := standby.Promote(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a connection", func() bool { return db.PingContext(t.Context()) == nil })
	wantCount(t, db, 100)
	execute(t, db, "INSERT INTO numbers VALUES (100)")
}

func TestGaleraNodesLeaveAndJoin(t *testing.T) {
	t.Parallel()
	cluster, err := testserver.Galera(3)
	if testserver.IsMissing(err) {
		testenv.Missing(t, "galera", err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, node := range cluster {
		t.Cleanup(node.Remove)
	}
	execute(t, open(t, "mysql", cluster[0].DSN), "CREATE TABLE numbers (n INT PRIMARY KEY)")
	for n, node := range cluster[:2] { // the first one had made the cluster
		node.Kill()
		other := open(t, "mysql", cluster[n+1].DSN)
		execute(t, other, "INSERT INTO numbers VALUES ("+strconv.Itoa(n)+")")
		if err := node.Start(); err != nil {
			t.Fatal(err)
		}
		db := open(t, "mysql", node.DSN+"&wsrep_sync_wait=7") // see what the others committed
		wantCount(t, db, n+1)
	}
}

// started skips the test if the server is not installed, and removes it after the test.
func started(t *testing.T, name string) func(*testserver.Server, error) *testserver.Server {
	t.Helper()
	return func(server *testserver.Server, err error) *testserver.Server {
		t.Helper()
		if testserver.IsMissing(err) {
			testenv.Missing(t, name, err.Error())
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(server.Remove)
		return server
	}
}

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func wantCount(t *testing.T, db *sql.DB, want int) {
	t.Helper()
	var count int
	if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM numbers").Scan(&count); err != nil || count != want {
		t.Errorf("%d rows, want %d: %v", count, want, err)
	}
}

func wantAnswer(t *testing.T, server *testserver.Server, want bool) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", "127.0.0.1:"+strconv.Itoa(server.Port))
	if err == nil {
		_ = conn.Close()
	}
	if (err == nil) != want {
		t.Errorf("%s: %v, want an answer: %t", server.DSN, err, want)
	}
}

// waitFor waits for what other processes do.
func waitFor(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for deadline := time.After(time.Minute); !happened(); {
		select {
		case <-deadline:
			t.Fatal("waited in vain for ", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func execute(t *testing.T, db *sql.DB, statement string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement); err != nil {
		t.Fatal(err)
	}
}
