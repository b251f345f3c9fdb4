package wireproxy_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
)

var query, other = pg('Q', "UPDATE stock\x00"), pg('Q', "COMMIT\x00")

func wantFired(t *testing.T, trap *wireproxy.Trap, name string) {
	t.Helper()
	if message, fired := trap.Fired(); !fired || message.Name != name {
		t.Errorf("fired: %t at %q, want at %s", fired, message, name)
	}
}

func TestCutBeforeLosesTheRequest(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(parse, bind)
		conn.send(parsed) // too late: the connection is cut already
		conn.expectEnd()
	}))
	client := dial(t, p)
	login(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.CutBefore, From: wireproxy.FromClient, N: 3})
	client.send(parse, bind, execute, syncing)
	client.expectEnd()
	wantFired(t, trap, "Execute")
}

func TestCutAfterLosesTheReplyOfAnExecutedRequest(t *testing.T) {
	t.Parallel()
	executed := make(chan struct{})
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(query)
		conn.send(complete, ready)
		conn.expectEnd()
		close(executed)
	}))
	client := dial(t, p)
	login(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.CutAfter})
	client.send(query)
	client.expectEnd()
	wantFired(t, trap, "Query")
	select {
	case <-executed:
	default:
		t.Error("the client learned of the cut before the server had executed the request")
	}
}

func TestCutBeforeLosesTheReply(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(query)
		conn.send(complete, ready)
		conn.expectEnd()
	}))
	client := dial(t, p)
	login(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.CutBefore, From: wireproxy.FromServer, N: 2})
	client.send(query)
	client.expect(complete)
	client.expectEnd()
	wantFired(t, trap, "ReadyForQuery")
}

func TestCutAfterTheReplyLeavesADeadConnection(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.MySQL, fakeServer(t, func(conn *peer) {
		acceptMySQL(conn)
		conn.expect(my(0, "\x03COMMIT"))
		conn.send(myOK)
		conn.expectEnd()
	}))
	client := dial(t, p)
	loginMySQL(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.CutAfter, From: wireproxy.FromServer})
	client.send(my(0, "\x03COMMIT"))
	client.expect(myOK)
	client.expectEnd()
	wantFired(t, trap, "OK")
}

func TestDropLosesOneMessage(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(query)
		conn.send(complete, ready)
	}))
	client := dial(t, p)
	login(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.Drop, From: wireproxy.FromClient})
	client.send(other, query)
	client.expect(complete, ready)
	wantFired(t, trap, "Query")
}

func TestStallHoldsBothDirectionsUntilReleased(t *testing.T) {
	t.Parallel()
	notice := pg('N', "Ctext\x00\x00")
	noticed := make(chan struct{})
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.send(notice)
		<-noticed
		conn.send(notice) // held, although no answer
		conn.expect(query, other)
		conn.send(complete, ready)
	}))
	client := dial(t, p)
	login(client)
	client.expect(notice)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.Stall, From: wireproxy.FromClient})
	client.send(query)
	<-trap.Done()
	close(noticed)
	client.send(other)
	if err := client.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v, want nothing during the stall", err)
	}
	if err := client.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	trap.Release()
	client.expect(notice, complete, ready)
	wantFired(t, trap, "Query")
}

func TestStallEndsWhenTheClientCloses(t *testing.T) {
	t.Parallel()
	for _, from := range []wireproxy.Direction{wireproxy.FromClient, wireproxy.FromServer} {
		t.Run(fmt.Sprintf("from=%d", from), func(t *testing.T) {
			t.Parallel()
			ended := make(chan struct{})
			p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
				defer close(ended)
				acceptPostgres(conn)
				if from == wireproxy.FromServer {
					conn.expect(query)
					conn.send(complete, ready)
				}
				conn.expectEnd() // without the request
			}))
			client := dial(t, p)
			login(client)
			trap := p.Arm(wireproxy.Fault{Kind: wireproxy.Stall, From: from})
			client.send(query)
			<-trap.Done()
			if err := client.Close(); err != nil {
				t.Fatal(err)
			}
			<-ended
		})
	}
}

func TestStallHidesThatTheServerClosed(t *testing.T) {
	t.Parallel()
	closed := make(chan struct{})
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(query)
		conn.send(complete, ready)
		_ = conn.Close()
		close(closed)
	}))
	client := dial(t, p)
	login(client)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.Stall, From: wireproxy.FromServer})
	client.send(query)
	<-trap.Done()
	<-closed
	if err := client.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read: %v, want nothing during the stall", err)
	}
	if err := client.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	trap.Release()
	client.expect(complete, ready)
	client.expectEnd()
}

func TestFaultHappensOnce(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		for {
			message := make([]byte, len(query))
			if n, err := conn.Read(message); err != nil || n < len(query) {
				return
			}
			conn.send(complete, ready)
		}
	}))
	first := dial(t, p)
	login(first)
	trap := p.Arm(wireproxy.Fault{
		Kind: wireproxy.CutBefore,
		N:    3,
		Match: func(m wireproxy.Message) bool {
			return m.Name == "Query" && m.Text == "UPDATE stock"
		},
	})
	for range 2 {
		first.send(query)
		first.expect(complete, ready)
	}
	if message, fired := trap.Fired(); fired {
		t.Errorf("fired early, at %q", message)
	}
	first.send(query)
	first.expectEnd()
	wantFired(t, trap, "Query")

	second := dial(t, p)
	login(second)
	second.send(query)
	second.expect(complete, ready)
}

func TestReleaseDisarms(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, acceptPostgres))
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.CutBefore})
	trap.Release()
	login(dial(t, p))
	if message, fired := trap.Fired(); fired {
		t.Errorf("fired at %q", message)
	}
}

// Whatever is open or stalled, Close leaves nothing running: it waits for it, so that it would hang otherwise.
func TestCloseEndsEverything(t *testing.T) {
	t.Parallel()
	loggedIn := false
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		if !loggedIn { // the second connection is stalled before
			acceptPostgres(conn)
			loggedIn = true
		}
		conn.expectEnd()
	}))
	idle := dial(t, p)
	login(idle)
	trap := p.Arm(wireproxy.Fault{Kind: wireproxy.Stall})
	stalled := dial(t, p)
	stalled.send(startup)
	<-trap.Done()
	p.Close()
	idle.expectEnd()
	stalled.expectEnd()
	if n := p.Conns(); n != 0 {
		t.Errorf("%d connections left", n)
	}
}

// The proof that CutAfter means executed, and CutBefore means not executed, on servers that are not fakes.
func TestCutsAroundACommit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		driver, statement string
		dsn               func(testing.TB) string
	}{
		{"pgx", "INSERT INTO %s VALUES ($1)", testenv.PostgreSQL},
		{"postgres", "INSERT INTO %s VALUES ($1)", testenv.PostgreSQL},
		{"mysql", "INSERT INTO %s VALUES (?)", testenv.MariaDB},
	} {
		for kind, want := range map[wireproxy.Kind]int{wireproxy.CutBefore: 0, wireproxy.CutAfter: 1} {
			t.Run(fmt.Sprintf("driver=%s/kind=%s", test.driver, kind), func(t *testing.T) {
				t.Parallel()
				proxy, dsn := wireproxy.Through(t, test.dsn(t))
				db := open(t, test.driver, dsn)
				table := createTable(t, db)
				trap := proxy.Arm(wireproxy.Fault{Kind: kind, From: wireproxy.FromClient, Match: wireproxy.Statement("commit")})
				err := transaction(t.Context(), db, fmt.Sprintf(test.statement, table), 1)
				if _, fired := trap.Fired(); !fired || err == nil {
					t.Fatalf("fired: %t, error: %v\n%s", fired, err, proxy.Snapshot())
				}
				var rows int
				if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM "+table).Scan(&rows); err != nil {
					t.Fatal(err)
				}
				if rows != want {
					t.Errorf("%d rows, want %d", rows, want)
				}
			})
		}
	}
}

// createTable creates a table of one integer column, and drops it when the test ends.
func createTable(t *testing.T, db *sql.DB) string {
	t.Helper()
	table := fmt.Sprintf("wireproxy_%d", time.Now().UnixNano())
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE "+table+" (n int)"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := db.ExecContext(context.WithoutCancel(t.Context()), "DROP TABLE "+table); err != nil {
			t.Error(err)
		}
	})
	return table
}
