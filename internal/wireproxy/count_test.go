package wireproxy_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/watermill-inbox/inbox/internal/wireproxy"
)

// fakeServer accepts connections, and runs serve for each.
func fakeServer(t *testing.T, serve func(conn *peer)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = listener.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serve(newPeer(t, conn))
			_ = conn.Close()
		}
	}()
	return listener.Addr().String()
}

// peer is one end of a connection. Its methods end in an error of the test instead of hanging.
type peer struct {
	net.Conn
	t *testing.T
}

func newPeer(t *testing.T, conn net.Conn) *peer {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Error(err)
	}
	return &peer{Conn: conn, t: t}
}

func dial(t *testing.T, p *wireproxy.Proxy) *peer {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return newPeer(t, conn)
}

func (p *peer) send(messages ...[]byte) {
	p.t.Helper()
	if _, err := p.Write(bytes.Join(messages, nil)); err != nil {
		p.t.Errorf("send: %v", err)
	}
}

// expect reads what must come next.
func (p *peer) expect(messages ...[]byte) {
	p.t.Helper()
	want := bytes.Join(messages, nil)
	got := make([]byte, len(want))
	if n, err := io.ReadFull(p, got); err != nil || !bytes.Equal(got, want) {
		p.t.Errorf("received %.200q (%v), want %.200q", got[:n], err, want)
	}
}

// expectEnd reads the end of the connection, before which nothing may come.
func (p *peer) expectEnd() {
	p.t.Helper()
	rest, err := io.ReadAll(p)
	if len(rest) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		p.t.Errorf("received %q (%v), want the end of the connection", rest, err)
	}
}

func listen(t *testing.T, protocol wireproxy.Protocol, target string) *wireproxy.Proxy {
	t.Helper()
	p, err := wireproxy.Listen(protocol, target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	p.Record()
	return p
}

func wantRoundTrips(t *testing.T, p *wireproxy.Proxy, want int) {
	t.Helper()
	if got := p.Snapshot(); got.RoundTrips != want {
		t.Errorf("%d round trips, want %d:\n%s", got.RoundTrips, want, got)
	}
}

// wantMessages compares the names of the recorded messages, of which > begins a client's.
func wantMessages(t *testing.T, p *wireproxy.Proxy, want string) {
	t.Helper()
	var names []string
	for _, message := range p.Snapshot().Messages {
		name := "<" + message.Name
		if message.From == wireproxy.FromClient {
			name = ">" + message.Name
		}
		names = append(names, name)
	}
	if got := strings.Join(names, " "); got != want {
		t.Errorf("messages:\n%s\nwant:\n%s", got, want)
	}
}

// pg is a message with a type.
func pg(kind byte, body string) []byte {
	message := binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4))
	return append(message, body...)
}

// pgUntyped is a message of the startup.
func pgUntyped(code uint32, body string) []byte {
	message := binary.BigEndian.AppendUint32(nil, uint32(len(body)+8))
	return append(binary.BigEndian.AppendUint32(message, code), body...)
}

var (
	startup  = pgUntyped(3<<16, "user\x00postgres\x00\x00")
	authOK   = pg('R', "\x00\x00\x00\x00")
	ready    = pg('Z', "I")
	parse    = pg('P', "s\x00UPDATE stock\x00\x00\x00")
	bind     = pg('B', "\x00s\x00\x00\x00\x00\x00\x00\x00")
	execute  = pg('E', "\x00\x00\x00\x00\x00")
	syncing  = pg('S', "")
	parsed   = pg('1', "")
	bound    = pg('2', "")
	complete = pg('C', "UPDATE 1\x00")
)

// acceptPostgres answers a login that needs no password.
func acceptPostgres(conn *peer) {
	conn.expect(startup)
	conn.send(authOK, pg('S', "TimeZone\x00UTC\x00"), pg('K', "\x00\x00\x00\x01\x00\x00\x00\x02"), ready)
}

// login is the client's part of it.
func login(client *peer) {
	client.send(startup)
	client.expect(authOK, pg('S', "TimeZone\x00UTC\x00"), pg('K', "\x00\x00\x00\x01\x00\x00\x00\x02"), ready)
}

func TestPostgresCountsAPipelineAsOneRoundTrip(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(parse, bind, execute, bind, execute, syncing)
		conn.send(parsed, bound, complete, bound, complete, ready)
		conn.expect(bind, execute, syncing)
		conn.send(bound, complete, ready)
		conn.expect(pg('X', ""))
	}))
	client := dial(t, p)
	login(client)
	wantRoundTrips(t, p, 1)
	p.Reset()
	client.send(parse, bind, execute, bind, execute, syncing)
	client.expect(parsed, bound, complete, bound, complete, ready)
	wantRoundTrips(t, p, 1)
	wantMessages(t, p, ">Parse >Bind >Execute >Bind >Execute >Sync "+
		"<ParseComplete <BindComplete <CommandComplete <BindComplete <CommandComplete <ReadyForQuery")
	client.send(bind, execute, syncing)
	client.expect(bound, complete, ready)
	wantRoundTrips(t, p, 2)
	if got := p.Snapshot(); got.ByConn[1] != 2 || got.Messages[4].Text != "UPDATE stock" {
		t.Errorf("by connection %v, message %q", got.ByConn, got.Messages[4])
	}
	client.send(pg('X', ""))
	client.expectEnd()
}

func TestPostgresCountsSyncsSentAtOnceAsOneRoundTrip(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		for range 3 { // answered one by one, as a server does
			conn.expect(bind, execute, syncing)
			conn.send(bound, complete, ready)
		}
	}))
	client := dial(t, p)
	login(client)
	p.Reset()
	client.send(bind, execute, syncing, bind, execute, syncing, bind, execute, syncing)
	for range 3 {
		client.expect(bound, complete, ready)
	}
	wantRoundTrips(t, p, 1)
}

func TestPostgresCountsFlushAndCopyAsWaits(t *testing.T) {
	t.Parallel()
	copyIn, described := pg('G', "\x00\x00\x00"), pg('n', "")
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(parse, pg('D', "Ss\x00"), pg('H', ""))
		conn.send(parsed, described)
		conn.expect(bind, execute, syncing)
		conn.send(bound, complete, ready)
		conn.expect(pg('Q', "COPY t FROM STDIN\x00"))
		conn.send(copyIn)
		conn.expect(pg('d', "1"), pg('d', "2"), pg('c', ""))
		conn.send(pg('C', "COPY 2\x00"), ready)
	}))
	client := dial(t, p)
	login(client)
	p.Reset()
	client.send(parse, pg('D', "Ss\x00"), pg('H', ""))
	client.expect(parsed, described)
	wantRoundTrips(t, p, 1)
	client.send(bind, execute, syncing)
	client.expect(bound, complete, ready)
	wantRoundTrips(t, p, 2)
	client.send(pg('Q', "COPY t FROM STDIN\x00"))
	client.expect(copyIn)
	wantRoundTrips(t, p, 3)
	client.send(pg('d', "1"), pg('d', "2"), pg('c', ""))
	client.expect(pg('C', "COPY 2\x00"), ready)
	wantRoundTrips(t, p, 4)
}

func TestPostgresCountsThePasswordExchange(t *testing.T) {
	t.Parallel()
	ask, answer := pg('R', "\x00\x00\x00\x05salt"), pg('p', "md5…\x00")
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		conn.expect(startup)
		conn.send(ask)
		conn.expect(answer)
		conn.send(authOK, ready)
		conn.expect(pg('Q', ";\x00"))
		conn.send(pg('I', ""), ready)
	}))
	client := dial(t, p)
	client.send(startup)
	client.expect(ask)
	client.send(answer)
	client.expect(authOK, ready)
	wantRoundTrips(t, p, 2)
	client.send(pg('Q', ";\x00"))
	client.expect(pg('I', ""), ready)
	wantRoundTrips(t, p, 3)
}

func TestPostgresRefusesEncryptionForTheServer(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, acceptPostgres))
	client := dial(t, p)
	client.send(pgUntyped(80877104, ""))
	client.expect([]byte{'N'})
	client.send(pgUntyped(80877103, ""))
	client.expect([]byte{'N'})
	login(client)
	wantRoundTrips(t, p, 3)
}

func TestPostgresPassesCancelRequests(t *testing.T) {
	t.Parallel()
	cancel := pgUntyped(80877102, "\x00\x00\x00\x01\x00\x00\x00\x02")
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) { conn.expect(cancel) }))
	client := dial(t, p)
	client.send(cancel)
	client.expectEnd()
	wantRoundTrips(t, p, 0)
	wantMessages(t, p, ">CancelRequest")
}

func TestPostgresMessagesSplitOverReads(t *testing.T) {
	t.Parallel()
	byByte := func(conn *peer, messages ...[]byte) {
		for _, b := range bytes.Join(messages, nil) {
			conn.send([]byte{b})
		}
	}
	query := pg('Q', "SELECT 1\x00")
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		conn.expect(startup)
		byByte(conn, authOK, ready)
		conn.expect(query)
		byByte(conn, complete, ready)
	}))
	client := dial(t, p)
	byByte(client, startup)
	client.expect(authOK, ready)
	byByte(client, query)
	client.expect(complete, ready)
	wantRoundTrips(t, p, 2)
	wantMessages(t, p, ">StartupMessage <Authentication <ReadyForQuery >Query <CommandComplete <ReadyForQuery")
}

func TestPostgresLargeMessages(t *testing.T) {
	t.Parallel()
	query := pg('Q', "SELECT '"+strings.Repeat("x", 3<<20)+"'\x00")
	row := pg('D', strings.Repeat("y", 5<<20))
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expect(query)
		conn.send(row, row, complete, ready)
	}))
	client := dial(t, p)
	login(client)
	p.Reset()
	client.send(query)
	client.expect(row, row, complete, ready)
	wantRoundTrips(t, p, 1)
	wantMessages(t, p, ">Query <DataRow <DataRow <CommandComplete <ReadyForQuery")
}

func TestMalformedMessageEndsTheConnection(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.PostgreSQL, fakeServer(t, func(conn *peer) {
		acceptPostgres(conn)
		conn.expectEnd()
	}))
	client := dial(t, p)
	login(client)
	p.Reset()
	client.send([]byte("Q\xff\xff\xff\xff"))
	client.expectEnd()
	wantMessages(t, p, ">malformed message")
}

// my is a packet.
func my(sequence byte, body string) []byte {
	n := len(body)
	return append([]byte{byte(n), byte(n >> 8), byte(n >> 16), sequence}, body...)
}

// greeting has the given capabilities in its lower half.
func greeting(capabilities uint16) []byte {
	body := []byte("\x0a10.11.6-MariaDB\x00\x01\x00\x00\x00saltsalt\x00")
	return my(0, string(binary.LittleEndian.AppendUint16(body, capabilities))+"\x21\x02\x00rest")
}

var myOK = my(1, "\x00\x00\x00\x02\x00\x00\x00")

// acceptMySQL answers a login.
func acceptMySQL(conn *peer) {
	conn.send(greeting(0xffff))
	conn.expect(my(1, "login"))
	conn.send(my(2, "\x00\x00\x00\x02\x00\x00\x00"))
}

func loginMySQL(client *peer) {
	client.expect(greeting(0xffff &^ 0x820))
	client.send(my(1, "login"))
	client.expect(my(2, "\x00\x00\x00\x02\x00\x00\x00"))
}

func TestMySQLCountsCommandsThatAreAnswered(t *testing.T) {
	t.Parallel()
	prepare, prepared := my(0, "\x16UPDATE stock"), my(1, "\x00\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	execute := my(0, "\x17\x07\x00\x00\x00\x00\x01\x00\x00\x00")
	longData, closing, quit := my(0, "\x18\x07\x00\x00\x00\x00\x00blob"), my(0, "\x19\x07\x00\x00\x00"), my(0, "\x01")
	p := listen(t, wireproxy.MySQL, fakeServer(t, func(conn *peer) {
		acceptMySQL(conn)
		conn.expect(prepare)
		conn.send(prepared)
		conn.expect(longData, execute)
		conn.send(myOK)
		conn.expect(closing, my(0, "\x03COMMIT"))
		conn.send(my(1, "\xff\xbd\x04#40001Deadlock found"))
		conn.expect(quit)
	}))
	client := dial(t, p)
	loginMySQL(client)
	wantRoundTrips(t, p, 1)
	p.Reset()
	client.send(prepare)
	client.expect(prepared)
	client.send(longData, execute)
	client.expect(myOK)
	wantRoundTrips(t, p, 2)
	if got := p.Snapshot().Messages[3]; got.Name != "COM_STMT_EXECUTE" || got.Text != "UPDATE stock" {
		t.Errorf("got %q, want the text of the prepared statement", got)
	}
	client.send(closing, my(0, "\x03COMMIT"))
	client.expect(my(1, "\xff\xbd\x04#40001Deadlock found"))
	wantRoundTrips(t, p, 3)
	client.send(quit)
	client.expectEnd()
	wantRoundTrips(t, p, 3)
	wantMessages(t, p, ">COM_STMT_PREPARE <prepared >COM_STMT_SEND_LONG_DATA >COM_STMT_EXECUTE <OK "+
		">COM_STMT_CLOSE >COM_QUERY <ERR >COM_QUIT")
}

func TestMySQLCountsEachPacketOfTheLogin(t *testing.T) {
	t.Parallel()
	p := listen(t, wireproxy.MySQL, fakeServer(t, func(conn *peer) {
		conn.send(greeting(0))
		conn.expect(my(1, "login"))
		conn.send(my(2, "\xfemysql_native_password\x00salt"))
		conn.expect(my(3, "scramble"))
		conn.send(my(4, "\x00\x00\x00\x02\x00\x00\x00"))
	}))
	client := dial(t, p)
	client.expect(greeting(0))
	client.send(my(1, "login"))
	client.expect(my(2, "\xfemysql_native_password\x00salt"))
	client.send(my(3, "scramble"))
	client.expect(my(4, "\x00\x00\x00\x02\x00\x00\x00"))
	wantRoundTrips(t, p, 2)
}

func TestMySQLMessageOfSeveralPackets(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("x", 1<<24-2) // with the command byte the first packet is full
	large := bytes.Join([][]byte{my(0, "\x03"+text), my(1, "and the rest")}, nil)
	p := listen(t, wireproxy.MySQL, fakeServer(t, func(conn *peer) {
		acceptMySQL(conn)
		conn.expect(large)
		conn.send(myOK)
	}))
	client := dial(t, p)
	loginMySQL(client)
	p.Reset()
	client.send(large)
	client.expect(myOK)
	wantRoundTrips(t, p, 1)
	wantMessages(t, p, ">COM_QUERY <OK")
}
